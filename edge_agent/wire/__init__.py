"""The protocol between coordinator and agents: topics, messages, tensors, blobs, and the transports that carry them.

Both sides use this room, so nothing here knows what a coordinator or an agent does with a message. Paho is imported in
`mqtt` alone. What is sent may be lost, repeated or sent by somebody else: everything that arrives is checked here
before it is used.

Read in this order: `topics`, `messages` (their form), `tensors` (arrays as bytes), `update_file` and `packed` (updates,
and sums of them, as files), `blobs` (large files in chunks), `seal` (which commands are authentic), `faults` (errors
that cross the wire), `transport` (the contract), `memory` and `mqtt` (its two implementations), `failover` (which
broker of a list is connected), `login` (advice where a broker refuses), `inbox` (events that wait between a network
thread and the program), `broker_traits` (what tells one broker from another), `broker_kinds` (which one it is, and its
limits) and `broker_steps` (the way to a broker, step by step).
"""
