"""The actors, one per module, and the classes that they are built from.

Import this package as `llama_worker.actors` only: as plain `actors` every class would exist twice.
"""
