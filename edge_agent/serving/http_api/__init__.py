"""How the personal model is asked over HTTP: a small server, and the routes that it has. No route computes anything.

Read in this order: `messages` (requests, responses, and the contract of routes), `access` (who may ask), `server`
(bytes to requests and back, under limits of size, time and number), then the routes: `classify`,
`open_inference`, `health`, `metrics` and `page`.
"""
