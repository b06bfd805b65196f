"""OpenAI's Responses API over chat completions: pure parts, and the messages of the actor that uses
them."""
