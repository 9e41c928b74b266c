"""Replies by the target against transformers' own batched generation: python tests/bench_replies.py MODEL

Both answer the same first `--prompts` prompts of smollm2-chats.jsonl.gz greedily, each in a process of its
own, and are timed from the loaded model to the last row; tokens are counted up to a reply's end. Run it twice
for figures: the first time compiles, for both. Two JSON lines. `--shape tiny`: 24 prompts of 8 tokens.
"""
import argparse
import gzip
import json
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
import transformers

sys.path.insert(0, str(Path(__file__).parent.parent))
import train_dflash as t

CHATS = Path(__file__).parent / "smollm2-chats.jsonl.gz"

def library(model, texts, new_tokens, size):
    """transformers alone: prompts sorted by length, batches of `size`, static cache -> tokens, seconds."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    tokenizer = transformers.AutoTokenizer.from_pretrained(model, padding_side="left")
    dtype, end = t.compute_dtype(device), tokenizer.eos_token_id
    target = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=dtype).to(device)
    chats = ([{"role": "user", "content": text}] for text in texts)
    prompts = sorted((tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
                      for chat in chats), key=len)
    begin, tokens = time.monotonic(), 0
    for at in range(0, len(prompts), size):
        batch = tokenizer.pad({"input_ids": prompts[at: at + size]}, return_tensors="pt").to(device)
        out = target.generate(**batch, max_new_tokens=new_tokens, do_sample=False, eos_token_id=end,
                              pad_token_id=end, cache_implementation="static")
        replies = out[:, batch["input_ids"].shape[1]:] == end
        tokens += int((replies.cumsum(1) - replies.int() == 0).sum())
    return tokens, time.monotonic() - begin

def trainer(model, texts, new_tokens):
    """The same by --regenerate -> tokens, seconds, as its last line tells them."""
    with tempfile.TemporaryDirectory() as folder:
        prompts = Path(folder) / "prompts.jsonl"
        prompts.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts))
        said = subprocess.run(
            [sys.executable, t.__file__, "--regenerate", prompts, "--target", model, "--replies",
             Path(folder) / "replies.jsonl", "--new-tokens", str(new_tokens), "--max-length", "2048"],
            capture_output=True, text=True, check=True).stdout
        rows = [json.loads(line) for line in (Path(folder) / "replies.jsonl").read_text().splitlines()]
    assert len(rows) == len(texts), said
    tokens, rate = (int(x.replace(",", "")) for x in re.findall(r"([\d,]+) tokens[,/]", said)[-2:])
    assert tokens == sum(sum(row["loss_mask"]) for row in rows)
    return tokens, tokens / rate

if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("model", type=Path)
    parser.add_argument("--prompts", type=int, default=4096)
    parser.add_argument("--shape", choices=("full", "tiny"), default="full")
    parser.add_argument("--library", action="store_true", help="this process is transformers alone")
    arguments = parser.parse_args()
    tiny = arguments.shape == "tiny"
    with gzip.open(CHATS, "rt") as f:
        chats = [json.loads(line) for line in f]
    asked = [chat["messages"][0]["content"] for chat in chats][: 24 if tiny else arguments.prompts]
    how = arguments.model, asked, 8 if tiny else 256
    count, seconds = library(*how, 8 if tiny else 1024) if arguments.library else trainer(*how)
    print(json.dumps({"bench": "replies", "who": "transformers" if arguments.library else "--regenerate",
                      "prompts": len(asked), "tokens": count, "seconds": round(seconds, 1),
                      "tokens_per_s": round(count / seconds), "torch": str(torch.__version__),
                      "transformers": transformers.__version__}), flush=True)
    if not arguments.library:
        subprocess.run([sys.executable, *sys.argv, "--library"], check=True)
