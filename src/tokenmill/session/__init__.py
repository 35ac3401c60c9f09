"""Conversations as first-class objects: an exact token log each, routed to one engine core for life."""
