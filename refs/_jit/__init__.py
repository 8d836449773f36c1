"""`refs.jit`: the compiled forms of a function, which of them a call runs, and how."""
