"""The threads: each module is one actor with its mailbox, or what the actors share to do things in
time.

Import this package as `llama_worker.actors` only: as plain `actors` every class would exist twice.
"""
