"""Train a small transformers model while another process answers requests with its newest weights.

    python bench/serve_while_training.py                                  one rank
    torchrun --nproc-per-node 2 bench/serve_while_training.py --stage 3   two ranks, parameters sharded

The first rank starts a server over HTTP, a process of its own without a process group. Its thread follows the weights
that all ranks publish after each step; requests hold a lock, so that none sees the weights of two versions. The model
learns to count: what comes after 3, 4, 5. Now and then the first rank asks the server to go on counting, and prints the
version of the weights and the answer.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import threading
import urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, urlparse

import torch
import torch.distributed as dist
import transformers
from torch import Tensor, nn

import zero

VOCABULARY, LENGTH, ASKED, ANSWERED = 32, 16, 3, 4


def new_model() -> nn.Module:
    """Build a GPT-2 of 0.1 M parameters, in bf16, with the same values in every process."""
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=VOCABULARY, n_positions=LENGTH, n_embd=64, n_layer=2, n_head=4, bos_token_id=0, eos_token_id=0
    )
    return transformers.GPT2LMHeadModel(config).bfloat16()


def serve(folder: Path) -> None:
    """Answer requests ``/?tokens=3,4,5`` until this process is ended; prints its port."""
    model, lock = new_model().eval(), threading.Lock()
    subscriber = zero.Subscriber(folder, model, lock=lock)

    def follow() -> None:
        while True:
            try:
                subscriber.wait(60.0, poll_s=0.02)
            except zero.PublicationError as error:  # the model keeps its last good weights
                sys.stderr.write(f"{error}\n")

    class Answers(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            tokens = torch.tensor([[int(t) for t in parse_qs(urlparse(self.path).query)["tokens"][0].split(",")]])
            with lock, torch.inference_mode():
                version = subscriber.version
                for _ in range(ANSWERED):
                    tokens = torch.cat([tokens, model(tokens).logits[:, -1:].argmax(-1)], dim=1)
            body = json.dumps({"version": version, "tokens": tokens[0].tolist()}).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Answers)
    threading.Thread(target=follow, daemon=True).start()
    sys.stdout.write(f"{server.server_port}\n")
    sys.stdout.flush()
    server.serve_forever()


def ask(port: int, first: int) -> str:
    """Let the server count on from ``first``."""
    tokens = ",".join(str(first + i) for i in range(ASKED))
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/?tokens={tokens}", timeout=60) as response:
        answer = json.loads(response.read())
    return f"version {answer['version']}: {answer['tokens'][:ASKED]} -> {answer['tokens'][ASKED:]}"


def batch(generator: torch.Generator) -> Tensor:
    """Draw sequences that count up from a random number, int64 [16, LENGTH]."""
    starts = torch.randint(VOCABULARY, (16, 1), generator=generator)
    return (starts + torch.arange(LENGTH)) % VOCABULARY


def train(options: argparse.Namespace, folder: Path, port: int | None) -> None:
    """Train, and publish after each step; the rank with a ``port`` asks the server."""
    model, chance = new_model(), random.Random(0)
    optimizer = zero.ZeroOptimizer(model, torch.optim.AdamW, stage=options.stage, lr=options.lr)
    generator = torch.Generator().manual_seed(optimizer.topology.rank)
    with zero.Publisher(optimizer, folder) as publisher:
        for step in range(1, options.steps + 1):
            tokens = batch(generator)
            loss = model(input_ids=tokens, labels=tokens).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            publisher.publish(step)
            if port is not None and step % options.ask_every == 0:
                answer = ask(port, chance.randrange(VOCABULARY - ASKED - ANSWERED))
                sys.stdout.write(f"step {step}, loss {loss.item():.3f}; {answer}\n")
    optimizer.close()


def main() -> None:
    """Run a rank of the training, or with ``--serve`` the server."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--serve", type=Path, metavar="FOLDER", help="be the server of this folder")
    parser.add_argument("--stage", type=int, default=2)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--ask-every", type=int, default=20)
    parser.add_argument("--lr", type=float, default=3e-3)
    options = parser.parse_args()
    if options.serve is not None:
        serve(options.serve)
        return
    torch.set_num_threads(1)
    is_alone = "RANK" not in os.environ
    if not is_alone:
        zero.init_distributed("gloo")
    with tempfile.TemporaryDirectory() as name:  # that of the first rank is used by all
        server = None
        try:
            port = None
            if is_alone or dist.get_rank() == 0:
                command = [sys.executable, __file__, "--serve", name]
                server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
                assert server.stdout is not None, "it is piped"
                port = int(server.stdout.readline())
            train(options, Path(name), port)
        finally:
            if server is not None:
                server.kill()
                server.communicate()
    if not is_alone:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
