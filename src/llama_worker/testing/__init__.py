"""For tests of host programs: a llama-server that says what a test scripted."""
