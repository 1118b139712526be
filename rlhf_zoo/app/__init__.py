"""The comparison page.

`engine` samples two policies token by token, `page` shows their completions, and `space` deploys the page to a Hub.
"""
