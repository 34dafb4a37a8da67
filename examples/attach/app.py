"""A server that runs already: for GET /ADDRESS:PORT it downloads the page there, and answers with it."""
import http.server
import sys
import urllib.request


class App(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        try:
            with urllib.request.urlopen(f"http:/{self.path}/", timeout=60) as page:
                body = page.read()
        except OSError as error:
            body = f"failed: {error}\n".encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


http.server.ThreadingHTTPServer((sys.argv[1], 8000), App).serve_forever()
