"""Hung or only slow? Each scenario is a server's behaviour and the verdict that is due; run on real
processes."""
