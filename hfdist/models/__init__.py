"""Where the parts of a model are, found from its own structure. Model families are named in this package only."""
