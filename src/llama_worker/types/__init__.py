"""What goes into a worker and what comes out of it: plain data that serialises as it is. Pure."""
