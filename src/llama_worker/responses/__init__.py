"""OpenAI's Responses API on top of chat completions. `proxy` holds the public handle, `app` serves
a request, `api` translates between the two APIs, `http` is the HTTP and WebSocket server."""
