"""Real clients of other people, each in its own environment, against a real server: `make clients`."""
