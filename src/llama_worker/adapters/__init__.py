"""Where the library meets the outside. Optional: nothing else in the package needs an adapter to be imported."""
