"""The comparison page.

`engine` samples two policies token by token, `page` shows them, `space` puts the page on a Hub.
"""
