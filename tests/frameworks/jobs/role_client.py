"""Ask an OpenAI-compatible server in all ways, and generate with Hugging Face.

The last line is what the program has seen: the same with and without a role.
"""

import asyncio
import contextlib
import json
import os
import pickle
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import openai
import torch
from transformers import GPT2Config, GPT2LMHeadModel

import torchlens_perf as perf

AFTER_FIRST_BYTE_S = 0.2
USAGE = {"prompt_tokens": 7, "completion_tokens": 2, "total_tokens": 9}


class Handler(BaseHTTPRequestHandler):
    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if asked["model"] == "absent":
            self.answer(404, "application/json", json.dumps({"error": {"message": "no model"}}))
        elif asked.get("stream"):
            parts = [
                {"choices": [{"index": 0, "delta": {"content": text}, "text": text}]}
                for text in "ab"
            ]
            parts.append({"choices": [], "usage": USAGE})
            whole = [
                {"id": "x", "object": "x", "created": 0, "model": "m", **part} for part in parts
            ]
            lines = "".join(f"data: {json.dumps(each)}\n\n" for each in whole)
            self.answer(200, "text/event-stream", f"{lines}data: [DONE]\n\n")
        else:
            choice = {"index": 0, "text": "ab", "message": {"role": "assistant", "content": "ab"}}
            whole = {"id": "x", "object": "x", "created": 0, "model": "m", "usage": USAGE}
            self.answer(200, "application/json", json.dumps({**whole, "choices": [choice]}))

    def answer(self, status, kind, text):
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text[:1].encode())
        self.wfile.flush()
        time.sleep(AFTER_FIRST_BYTE_S)
        self.wfile.write(text[1:].encode())

    def log_message(self, format, *args):
        pass


def show(answer):
    return f"{type(answer).__name__} {answer.choices[0].model_dump_json()} {answer.usage}"


def ask(client, **settings):
    chat = {"model": "m", "messages": [{"role": "user", "content": "secret"}], **settings}
    yield lambda: client.chat.completions.create(**chat)
    yield lambda: client.completions.create(model="m", prompt="secret", **settings)


async def ask_in_turn(url):
    async with openai.AsyncOpenAI(base_url=url, api_key="-", max_retries=0) as client:
        seen = [show(await each()) for each in ask(client)]
        for each in ask(client, stream=True):
            stream = await each()
            seen.append([type(stream).__name__, *[str(part) async for part in stream]])
        asks = client.chat.completions.with_streaming_response.create
        async with asks(model="m", messages=[]) as response:
            seen.append([line async for line in response.iter_lines()])
    return seen


server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
threading.Thread(target=server.serve_forever, daemon=True).start()
url = f"http://127.0.0.1:{server.server_address[1]}/v1"
client = openai.OpenAI(base_url=url, api_key="-", max_retries=0)
with perf.watch() if "WATCHED" in os.environ else contextlib.nullcontext():
    seen = [show(each()) for each in ask(client)]
    for each in ask(client, stream=True):
        with each() as stream:
            seen.append([type(stream).__name__, *map(str, stream)])
    with client.completions.with_streaming_response.create(model="m", prompt="secret") as response:
        seen.append([type(response).__name__, response.read().decode()])
    seen += asyncio.run(ask_in_turn(url))
    try:
        client.completions.create(model="absent", prompt="secret")
    except openai.NotFoundError as error:
        seen.append(repr(error))
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=64, n_positions=32, n_embd=32, n_layer=1, n_head=2)
    model = GPT2LMHeadModel(config).eval()
    for prompt in ([[1, 2, 3]], [[1, 2], [3, 4]]):
        tokens = torch.tensor(prompt)
        made = model.generate(
            tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=4, eos_token_id=None,
            pad_token_id=0,
        )  # fmt: skip
        seen.append(made.tolist())
    for function in (model.generate.__func__, openai.resources.completions.Completions.create):
        seen.append([function.__qualname__, pickle.loads(pickle.dumps(function)) is function])
print(json.dumps(seen))
