"""The coding clients that people run, driven for real in front of a scripted server: Codex and
OpenCode, and a browser.

`make test-clients` installs them and runs every scenario in a network namespace with nothing but
loopback; `python -m tests.responses.clients --record` keeps what the clients sent, in
`tests/responses/recorded`, so that `make test` checks what becomes of it without them.
"""
