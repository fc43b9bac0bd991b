"""Inference on the device: a process that answers inputs with the personal model. No torch, and no federation.

Answers come from a pair: an encoder, and the head that was fitted on its features. A release, a fit or a rollback
replaces the pair between two answers. Inputs arrive by HTTP, from cameras, folders and sensors. Answers go to the
client that asked, to the page, to the metrics and to MQTT. Nothing here fits a head or joins a federation: both are
done by `edge_agent.agent`, in a process of its own.

Read in this order: `answer` (the result for one input), `pair` (the model that computes it), `pair_source` (which pair
is in use, and how a new one is noticed), `predictor` (answers one input at a time and switches between pairs), `inputs`
(decodes the bytes of clients), `history`, `corrections` and `refit` (the last answers, the labels that a person gives
them, and the fit that follows), `vote` (changes the state after several equal answers), `inputs_state` and
`inputs_watch` (detect that inputs have changed), `http_api` (the HTTP server), `sources` (cameras, folders and
sensors), `mqtt` (publishes answers), `service` (all parts as one program), `settings` (its configuration), `supervisor`
(runs it as a child of the agent), `announcement` (lets other commands find it).
"""
