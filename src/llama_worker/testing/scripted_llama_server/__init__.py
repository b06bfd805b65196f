"""A scripted stand-in for llama-server: real process, real sockets, every misbehaviour on demand.

    python -S -E scripted_llama_server --host H --port P --parallel N --script JSON [--journal FILE]

`llama_worker.testing.scripts` builds scripts and reads journals. The script: an object with the
fields of `scripts.Script`; a step of a reply: `{"do": NAME, ...}`, with the name and the arguments
of one of the functions of `steps`. Other llama-server flags are accepted and ignored. One thread
per connection, standard library only.
"""
