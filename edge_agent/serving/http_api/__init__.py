"""The HTTP server for answers, corrections and metrics: a small server, and its routes. No route computes anything.

Read in this order: `messages` (requests, responses, and the contract of routes), `access` (the token, and which
requests are allowed), `certificate` (TLS), `slots` (which connections stay open), `server` (parses requests and sends
responses, with limits of size, time and number), then the routes: `classify`, `open_inference`, `health`, `metrics` and
`page`.
"""
