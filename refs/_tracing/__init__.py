"""From a function over refs to an effectful jaxpr, and the analysis of what it does to each ref."""
