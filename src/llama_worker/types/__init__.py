"""A worker's input and output: plain data that can be serialised as it is. Pure."""
