"""Chat completions over HTTP: answers with what it was asked, as a stream where the request wants one, and prints each call."""

import json
import os
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

KEY = os.environ["KEY"]


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self):
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        allowed = self.headers["Authorization"] == f"Bearer {KEY}"
        print(json.dumps({"path": self.path, "allowed": allowed, "request": request}), flush=True)
        if self.path != "/v1/chat/completions" or not allowed:
            return self.answer(401, "application/json", json.dumps({"error": {"message": "wrong key"}}))
        text = "asked: " + request["messages"][-1]["content"].split("\n")[0] + " é🦀"
        usage = {"prompt_tokens": 11, "completion_tokens": 5, "total_tokens": 16, "cost": 0.25}
        if not request.get("stream"):
            choice = {"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": "stop"}
            whole = {"object": "chat.completion", "model": request["model"], "choices": [choice], "usage": usage}
            return self.answer(200, "application/json", json.dumps(whole))
        parts = [{"choices": [{"index": 0, "delta": {"content": letter}}]} for letter in text]
        parts += [{"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}, {"choices": [], "usage": usage}]
        events = [json.dumps({"object": "chat.completion.chunk", "model": request["model"], **part}) for part in parts]
        self.answer(200, "text/event-stream", "".join(f"data: {event}\n\n" for event in [*events, "[DONE]"]))

    def answer(self, status, kind, body):
        body = body.encode()
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


ThreadingHTTPServer(("0.0.0.0", 8080), Handler).serve_forever()
