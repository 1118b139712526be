"""Everything that talks the Hub's protocol. `client` talks to any Hub; `server` is the embedded Hub.

Nothing here knows recipes, runs or models.
"""
