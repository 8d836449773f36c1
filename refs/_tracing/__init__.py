"""From a function over refs to an effectful jaxpr, and what that does to each ref."""
