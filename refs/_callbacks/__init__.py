"""Host callbacks that are given the state's own memory."""
