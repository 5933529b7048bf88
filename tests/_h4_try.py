import torch, sys
from tests.worker import make_accelerator
from tests.models import build_lm, make_windows, VOCAB
def run(stage, k, precision, tied=False, family="llama"):
    from hfdist import ZeroPlugin, AmpPlugin
    from hfdist.measure.memory import sample_memory
    from hfdist.measure.wire import record_wire
    from hfdist.models.size import model_size
    from hfdist.plan import Layout, plan_step
    import torch.distributed as dist
    W=dist.get_world_size() if dist.is_initialized() else 1
    plugins=[ZeroPlugin(stage=stage)]
    if precision!="fp32": plugins.append(AmpPlugin(dtype=precision))
    acc=make_accelerator(plugins=plugins, gradient_accumulation_steps=k)
    model=build_lm(family,tied=tied)
    opt=torch.optim.AdamW(model.parameters(),lr=1e-3)
    model,opt=acc.prepare(model,opt)
    windows=make_windows(vocab=VOCAB[family],steps=3,gas=k,world_size=W,ragged=False)
    r=acc.process_index
    def window(w):
        for m in w:
            with acc.accumulate(model):
                acc.backward(model(**m[r]).loss)
                opt.step()
                if not acc.sync_gradients: opt.zero_grad()
    for w in windows[:2]:
        window(w); opt.zero_grad()
    with record_wire() as wire, sample_memory(model,opt) as s:
        window(windows[2])
    p=plan_step(model_size(model),Layout(stage=stage,world_size=W,precision=precision,micro_steps=k))
    return dict(report=s.report, wire=wire, plan=p, n=s.num_samples, top=s.at_peak_total)
