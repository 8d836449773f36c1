"""`Ref`, the types of refs, views, and the operations on them."""
