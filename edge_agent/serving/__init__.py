"""The personal model at work: a process that answers one input after the other. No torch, and no federation.

What answers is a pair: an encoder, and the head that was fitted on its features. A release, a fit or a rollback puts
another pair in its place, between two answers. Inputs come by HTTP, from cameras, folders and sensors; answers go to
whoever asked, to the page, to the metrics and to MQTT. Nothing here fits a head or joins a federation: for that, this
room asks `edge_agent.agent`, in a process of its own.

Read in this order: `answer` (what is said of one input), `pair` (what says it), `pair_source` (which pair is in use),
`predictor` (one input at a time, and the switch between two pairs), `inputs` (bytes of somebody else, decoded),
`history`, `corrections` and `refit` (what a person says of the last answers, and what is learned from it), `vote` (what
holds), `inputs_state` and `inputs_watch` (whether inputs have changed), `http_api` (how it is asked), `sources` (what
it looks at by itself), `mqtt` (whom it tells), `service` (all of it as a program), `announcement` (how it is found from
outside).
"""
