"""Everything that speaks the Hub's protocol. `client` talks to any Hub; `server` is the embedded Hub.

Nothing here depends on recipes, runs or models.
"""
