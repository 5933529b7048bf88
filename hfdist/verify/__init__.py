"""`hfdist models --verify`: every causal language model of transformers, tiny, split over ranks against one process.

check.py     what a rank does: one process first, then the same model and batch split by one technique
judge.py     what the ranks saw -> verified, or why not
ranks.py     groups of ranks that live on from type to type
record.py    results in a file, by versions and sources; as a table and as a page
command.py   the loop over types
"""
