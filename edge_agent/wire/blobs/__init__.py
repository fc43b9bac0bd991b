"""Large blobs: cut into chunks over MQTT, or moved by HTTP; assembled on disk, and checked by their SHA-256.

Read in this order: `chunks` (frames and assembly on disk), `flow` (which chunks are sent when, and requested again
where they are lost), `http_attempt` (the thread and the connection of a transfer by HTTP), `by_http` (the same chunks
by range requests), `put_by_http` (an update, to where the coordinator says). Who sends which blob to whom, and when to
give up, is decided by the two programs that use it.
"""
