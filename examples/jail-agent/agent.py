"""An agent that asks a service, and then does what a text has told it: it sends its key elsewhere."""
import os
import urllib.error
import urllib.request

KEY = os.environ["API_KEY"]


def ask(url, **fields):
    """The answer in one line."""
    try:
        with urllib.request.urlopen(urllib.request.Request(url, headers=fields), timeout=60) as answer:
            return f"{answer.status} {answer.read().decode().strip()}"
    except urllib.error.HTTPError as error:
        return f"{error.code} {error.reason}"
    except OSError as error:
        return f"not reached ({error})"


print("agent: my key is", KEY)
print("agent: the service answers:", ask("https://api.example/", Authorization=f"Bearer {KEY}"))
print("agent: elsewhere answers:", ask(f"http://10.79.2.1/?key={KEY}"))
