"""The metadata services of clouds, as far as they tell that a machine is to be taken away: real servers."""

import contextlib
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

NAME = "vm-7"
SESSION = "a-session"


class MetadataServer:
    """``taken``: whether the machine is to be; ``broken``: it answers otherwise than it should."""

    def __init__(self, cloud):
        self.taken, self.broken, self.asked = False, None, 0
        server = self

        class Answering(BaseHTTPRequestHandler):
            def do_GET(self):
                server.asked += 1
                self.say(*(server.broken or getattr(server, f"_{cloud}")("GET", self.path, self.headers)))

            def do_PUT(self):
                self.say(*(server.broken or getattr(server, f"_{cloud}")("PUT", self.path, self.headers)))

            def say(self, code, text):
                self.send_response(code)
                self.end_headers()
                self.wfile.write(text.encode())

            def log_message(self, *args):
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Answering)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def _aws(self, method, path, headers):
        if (method, path) == ("PUT", "/latest/api/token"):
            return (200, SESSION) if headers["X-aws-ec2-metadata-token-ttl-seconds"] else (400, "")
        if headers["X-aws-ec2-metadata-token"] != SESSION:
            return 401, ""
        if path != "/latest/meta-data/spot/instance-action" or not self.taken:
            return 404, "not found"
        return 200, json.dumps({"action": "terminate", "time": "2026-11-30T08:22:00Z"})

    def _gcp(self, method, path, headers):
        if headers["Metadata-Flavor"] != "Google":
            return 403, ""
        if path != "/computeMetadata/v1/instance/preempted":
            return 404, ""
        return 200, "TRUE" if self.taken else "FALSE"

    def _azure(self, method, path, headers):
        if headers["Metadata"] != "true":
            return 400, ""
        path, _, query = path.partition("?")
        if path == "/metadata/instance/compute/name" and "format=text" in query:
            return 200, NAME
        if path != "/metadata/scheduledevents" or "api-version=" not in query:
            return 404, ""
        other = {"EventType": "Preempt", "Resources": ["vm-8"], "NotBefore": "soon"}
        later = {"EventType": "Reboot", "Resources": [NAME], "NotBefore": "soon"}
        ours = {"EventType": "Preempt", "Resources": [NAME], "NotBefore": "Mon, 30 Nov 2026 18:29:47 GMT"}
        return 200, json.dumps({"DocumentIncarnation": 2, "Events": [other, later, *([ours] if self.taken else [])]})

    def close(self):
        self._server.shutdown()
        self._server.server_close()


@contextlib.contextmanager
def metadata_of(cloud):
    with contextlib.closing(MetadataServer(cloud)) as made:
        yield made
