def run_step(accelerator, fn, batch):
    return fn(batch)
