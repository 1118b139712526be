"""The comparison page.

`engine` samples two policies token by token, `page` shows their completions, `space` puts the page on a Hub.
"""
