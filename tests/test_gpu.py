"""The compiled step on a CUDA GPU: python -m pytest tests/test_gpu.py (without a GPU each test says that
it skips)."""

import os
import shutil

import numpy as np
import pytest
import torch
from conftest import finish, make_target, masters, metrics, run, start, until

import train_dflash as t

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="no CUDA GPU: flex_attention has no CPU backward"
)


def geometry(D=256, H=4, G=2, h=64, ffn=512, L=3, B=8, K=2, V=1000, window=0, causal=None):
    kinds = ["sliding_attention"] * (L - 1 if window else 0) + ["full_attention"] * (1 if window else L)
    config = {
        "hidden_size": D,
        "intermediate_size": ffn,
        "num_hidden_layers": L,
        "num_attention_heads": H,
        "num_key_value_heads": G,
        "head_dim": h,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "layer_types": kinds,
        "sliding_window": window or None,
        "block_size": B,
        "vocab_size": V,
        "dflash_config": {"target_layer_ids": list(range(K))},
    }
    return config if causal is None else {**config, "is_causal": causal}


def random_batch(draw, S, N, B, V, longest):
    """Documents of random length, each with an unsupervised head and random holes in its supervision."""
    begin, end, at = np.zeros(S, int), np.zeros(S, int), 0
    while at < S:
        n = min(int(draw.integers(2, longest)), S - at)
        begin[at : at + n], end[at : at + n] = at, at + n
        at += n
    supervised = draw.random(S) > 0.05
    supervised[np.arange(S) - begin < (end - begin) // 4] = False
    ids = draw.integers(0, V, S)
    return {"positions": np.arange(S) - begin, **t.blocks_of(ids, supervised, begin, end, N, B, draw)}


def run_step(step, drafter, ends, batch, features, loss):
    """One step on the device and in the dtype of `features` -> (counters, gradients by name)."""
    drafter.zero_grad()
    x = t.graph_inputs(batch, features.device.type)
    rows, gradient, counters = step(
        drafter,
        ends,
        features,
        x["positions"],
        x["start"],
        x["anchor"],
        x["tokens"],
        x["valid"],
        7,
        loss,
        4.0,
    )
    rows.backward(gradient)
    return counters.double().cpu(), {k: p.grad.double().cpu().clone() for k, p in drafter.named_parameters()}


@pytest.mark.parametrize(
    "loss,window,causal,B,h,backend",
    [
        ("dflash", 0, None, 8, 64, "TRITON"),
        ("dpace", 0, None, 16, 128, "TRITON"),  # Hopper's own tiles
        ("dflash", 96, None, 8, 128, "TRITON"),
        ("dpace", 96, False, 16, 64, "TRITON"),
        ("dflash", 0, None, 10, 64, "TRITON"),
        ("dflash", 0, None, 16, 128, "FLASH"),
        ("dpace", 96, None, 8, 128, "FLASH"),
        ("dflash", 96, False, 10, 128, "FLASH"),
    ],
)
def test_compiled_step_equals_float64(loss, window, causal, B, h, backend):
    """Catches any fault of the compiled path (tiles, flex backward, casts): loss and every gradient
    against the dense float64 step on a CPU, whose own reference is in test_drafter.py."""
    seed = int.from_bytes(os.urandom(4), "big")
    print("seed", seed)
    draw, S, N = np.random.default_rng(seed), 1024, 64
    config = geometry(window=window, causal=causal, B=B, h=h)
    drafter = t.Drafter(config)
    drafter.initialise(seed)
    choices = [x for x in t.attention_choices(h) if x["BACKEND"] == backend]
    if not choices:
        pytest.skip(f"{backend} is not on offer here: it needs Hopper and flash-attn-4")
    drafter.options = choices[0]
    torch.manual_seed(seed)
    batch = random_batch(draw, S, N, B, 1000, 400)
    features = torch.randn(S, 512).bfloat16()
    ends = {
        "embed": torch.randn(1000, 256).bfloat16(),
        "head": (torch.randn(1000, 256) / 4).bfloat16(),
        "embed_scale": 1.0,
        "softcap": 0.0,
        "rope": t.rotary(torch.arange(2100), 1e6, h),
    }
    exact = t.Drafter(config).double()
    exact.load_state_dict({k: v.double() for k, v in drafter.state_dict().items()})
    want = run_step(
        t.drafter_step,
        exact,
        {k: v.double() if isinstance(v, torch.Tensor) else v for k, v in ends.items()},
        batch,
        features.double(),
        loss,
    )
    step = torch.compile(t.drafter_step, fullgraph=True, dynamic=False)
    have = run_step(
        step,
        drafter.cuda(),
        {k: v.cuda() if isinstance(v, torch.Tensor) else v for k, v in ends.items()},
        batch,
        features.cuda(),
        loss,
    )
    torch.testing.assert_close(have[0][:2], want[0][:2], rtol=5e-3, atol=0)
    for k, g in want[1].items():
        assert (have[1][k] - g).norm() <= 3e-2 * g.norm() + 1e-9, (
            k,
            float((have[1][k] - g).norm() / g.norm()),
        )


@pytest.mark.parametrize("window", [0, 96])
def test_every_choice_of_attention_is_proven(window):
    """Catches a proof that refuses what is right, or a backend that is wrong: with every choice on offer here
    the errors are those of bf16."""
    drafter = t.Drafter(geometry(window=window, B=16, h=128)).cuda()
    anchor = torch.arange(300, 812, 8, device="cuda", dtype=torch.int32)
    start = torch.full_like(anchor, 256)
    for options in t.attention_choices(128):
        for rule in set(drafter.rules()):
            errors = t.attention_errors(drafter, options, rule, start, anchor, 1024)
            assert len(errors) == 4 and min(errors) > 1e-4 and max(errors) < 5e-3, (options, rule, errors)
    said = []
    options = t.fast_attention(drafter, start, anchor, 1024, said.append)
    assert options == t.attention_choices(128)[0]
    assert ("FLASH" in str(said)) == (options["BACKEND"] == "FLASH")


def test_one_graph_for_every_micro_batch():
    """Catches a graph that depends on what a micro-batch holds: 50 different ones, one compilation; after
    warm-up another shape is an error and not a second graph, and nothing ever runs dense."""
    draw, S, N, B = np.random.default_rng(0), 1024, 64, 8
    torch._dynamo.reset()
    drafter = t.Drafter(geometry()).cuda()
    drafter.initialise(0)
    ends = {
        "embed": torch.randn(1000, 256).bfloat16().cuda(),
        "head": torch.randn(1000, 256).bfloat16().cuda(),
        "embed_scale": 1.0,
        "softcap": 0.0,
        "rope": t.rotary(torch.arange(2100), 1e6, 64).cuda(),
    }
    step = torch.compile(t.drafter_step, fullgraph=True, dynamic=False)
    features = torch.randn(S, 512, device="cuda", dtype=torch.bfloat16)
    torch._dynamo.utils.counters.clear()
    run_step(step, drafter, ends, random_batch(draw, S, N, B, 1000, 300), features, "dflash")
    with torch.compiler.set_stance("fail_on_recompile"):
        for _ in range(49):
            run_step(step, drafter, ends, random_batch(draw, S, N, B, 1000, 300), features, "dflash")
        with pytest.raises(RuntimeError, match="recompile"):
            run_step(
                step,
                drafter,
                ends,
                random_batch(draw, 2 * S, N, B, 1000, 300),
                features.repeat(2, 1),
                "dflash",
            )
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


def test_graph_break_is_an_error():
    """Catches a step that would run in pieces: whatever cannot be traced raises instead of falling to
    eager (dense)."""

    def broken(*args):
        torch._dynamo.graph_break()
        return t.drafter_step(*args)

    drafter = t.Drafter(geometry()).cuda()
    ends = {
        "embed": torch.randn(1000, 256).bfloat16().cuda(),
        "head": torch.randn(1000, 256).bfloat16().cuda(),
        "embed_scale": 1.0,
        "softcap": 0.0,
        "rope": t.rotary(torch.arange(2100), 1e6, 64).cuda(),
    }
    features = torch.randn(1024, 512, device="cuda", dtype=torch.bfloat16)
    with pytest.raises(torch._dynamo.exc.Unsupported):
        run_step(
            torch.compile(broken, fullgraph=True),
            drafter,
            ends,
            random_batch(np.random.default_rng(0), 1024, 64, 8, 1000, 300),
            features,
            "dflash",
        )


def run_on(tiny, out, target, drafter):
    run(tiny, out, "--device", "cuda", "--max-steps", 6, "--target-gpus", target, "--drafter-gpus", drafter)
    return masters(out)


def furthest(one, other):
    return max(float((v - one[k]).abs().max()) for k, v in other.items())


@pytest.mark.parametrize("head_dim", [16, 128])  # of 128: by FlashAttention 4 where it is installed
def test_colocated_run_and_resume_on_a_gpu(head_dim, tiny, tmp_path, capsys):
    """Catches a run that does not come to its end on a GPU, a second graph (fail_on_recompile is set), and
    a resume that is further from the straight run than bf16 noise: 1e-3 after 6 steps at lr 2e-3, more only
    where two straight runs differ."""
    tiny = make_target(tmp_path / "target", head_dim=head_dim), tiny[1]
    straight, again = run_on(tiny, tmp_path / "a", 0, 0), run_on(tiny, tmp_path / "b", 0, 0)
    shutil.rmtree(tmp_path / "b" / "export")
    shutil.rmtree(tmp_path / "b" / "checkpoints" / "step-00000006")
    resumed = run_on(tiny, tmp_path / "b", 0, 0)  # from step 4
    noise, off = furthest(straight, again), furthest(straight, resumed)
    moved = furthest(straight, masters(tmp_path / "a", 2))
    with capsys.disabled():
        print(f"\nmasters, heads of {head_dim}: straight runs differ by {noise:.1e}, "
              f"a resumed one {off:.1e}, 4 steps {moved:.1e}")
    assert off <= 1e-3 + 2 * noise  # noise: FlashAttention's backward sums in no order, flex's own does


@pytest.mark.parametrize("window", [0, 40])
def test_drafting_on_a_gpu(window):
    """Catches a compiled drafting step that is compiled again, or drafts otherwise than eager float32."""
    config = geometry(window=window)
    drafter = t.Drafter(config).cuda()
    drafter.initialise(0)
    ends = {k: torch.randn(config["vocab_size"], 256, device="cuda") for k in ("embed", "head")}
    ends |= {"embed_scale": 1.0, "softcap": 0.0}
    exact = t.Draft(drafter, ends, 7, 200)
    half = t.Drafter(config)
    half.load_state_dict(drafter.state_dict())
    low = {k: v.bfloat16() if torch.is_tensor(v) else v for k, v in ends.items()}
    step = torch.compile(t.draft_step, fullgraph=True, dynamic=False)
    quick = t.Draft(half.cuda().bfloat16(), low, 7, 200, step=step)
    def off(new):
        features = torch.randn(new, 512, device="cuda")
        want, got = (draft.logits(new, features) for draft in (exact, quick))
        return float((got - want).norm() / want.norm())

    assert off(90) < 0.02  # 0.005 on a CPU
    with torch.compiler.set_stance("fail_on_recompile"):
        assert max(map(off, (1, 8, 3, 5))) < 0.02


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="fewer than 2 GPUs: the wire over NCCL needs two")
def test_split_over_two_gpus_equals_colocated(tiny, tmp_path):
    """Catches the wire over NCCL delivering other features, late or torn ones."""
    split, both = run_on(tiny, tmp_path / "a", 0, 1), run_on(tiny, tmp_path / "b", 0, 0)
    assert furthest(split, both) <= 1e-3


@pytest.mark.parametrize("when", ["while it compiles", "after step 1"])
def test_the_compile_cache_is_not_needed(when, tiny, tmp_path):
    """Catches a run that needs its compile cache after all: deleted while it is written, or in mid-run."""
    cache, out = tmp_path / "cache", tmp_path / "run"
    process = start(tiny, out, "--device", "cuda", "--max-steps", 40, "--target-gpus", 0, "--drafter-gpus", 0,
                    env={"TORCHINDUCTOR_CACHE_DIR": str(cache)})
    if when == "while it compiles":
        until(lambda: list(cache.glob("**/*.cubin")))
    else:
        until(lambda: metrics(out, "train"))
    assert list(cache.glob("**/*"))
    shutil.rmtree(cache, ignore_errors=True)  # what is being written may come back
    code, stdout, stderr = finish(process)
    assert code == 0, stdout + stderr
    assert metrics(out, "end")[-1]["status"] == "finished"
