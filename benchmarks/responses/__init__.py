"""What clients of the Responses API get from a llama-server: from its own, and from the proxy in
front of it."""
