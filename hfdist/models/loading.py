def load_into_shards(f): return lambda: None
def loaded_shards(m): return None
