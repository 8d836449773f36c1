"""The transaction that every wrapper runs, and the options that select arguments of a call."""
