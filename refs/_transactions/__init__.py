"""The transaction that every wrapper is, and what is said of a call's arguments."""
