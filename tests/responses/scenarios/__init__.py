"""What clients of the Responses API are used to, a list for each: real clients, a real model, what
the client shows.

The tests run every list against the proxy; `python -m benchmarks.responses` runs them against
llama-server's own Responses API as well. The server has `parrot.jinja`, which makes the model say
what the last message says, and stands behind a `Relay`, which breaks the streams that are to break.
"""

from pathlib import Path

_PARROT = Path(__file__).parents[1] / "parrot.jinja"
TEMPLATE_ARGS = ("--jinja", "--chat-template-file", str(_PARROT))
PARROT_ARGS = (*TEMPLATE_ARGS, "--chat-template-kwargs", '{"parrot": true}', "--temp", "0")
"""For the llama-server, beside two slots of 2048 tokens."""
