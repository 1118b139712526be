"""The code that uses the Hub's protocol. `client` talks to any Hub; `server` is the embedded Hub.

`markdown` renders cards as HTML, for the embedded Hub's pages and for the comparison page.

Nothing here depends on recipes, runs or models.
"""

#: Host names and addresses by which a client reaches a server on its own machine.
LOOPBACK_HOSTS = ("localhost", "127.0.0.1", "::1")
