"""OpenAI's Responses API over chat completions. `proxy` is the handle, `app` serves a request;
`api` translates, `http` speaks with clients."""
