"""Hold chats of two turns, or ask once for each judgement, with an OpenAI-compatible server.

usage: agent_client.py TURNS [torch]

The last line is what the program has seen: the same with and without a record.
"""

import json
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import openai

if "torch" in sys.argv:
    import torch

TOOL_S = 0.1


class Handler(BaseHTTPRequestHandler):
    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        message = {"role": "assistant", "content": "ask"}
        usage = {"prompt_tokens": 7, "completion_tokens": 2, "total_tokens": 9}
        whole = {"id": "x", "object": "x", "created": 0, "model": "m", "usage": usage}
        text = json.dumps({**whole, "choices": [{"index": 0, "message": message}]})
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, format, *args):
        pass


server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
threading.Thread(target=server.serve_forever, daemon=True).start()
url = f"http://127.0.0.1:{server.server_address[1]}/v1"
client = openai.OpenAI(base_url=url, api_key="-", max_retries=0)
seen = []
for sample in range(3):
    chat = [{"role": "user", "content": f"secret {sample}"}]
    for _ in range(int(sys.argv[1])):
        answer = client.chat.completions.create(model="m", messages=chat)
        seen.append(answer.choices[0].message.content)
        time.sleep(TOOL_S)
        chat += [answer.choices[0].message, {"role": "user", "content": "found"}]
if "torch" in sys.argv:
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weight], 0.1)
    weight.sum().backward()
    optimizer.step()
    seen.append(weight.tolist())
print(json.dumps(seen))
