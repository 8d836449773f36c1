"""Host callbacks that are given the refs' own memory."""
