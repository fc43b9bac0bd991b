"""Where large blobs go by HTTP: the coordinator's own endpoint, an object store, or a folder that is served.

Each of them is a class behind the contracts `coordinator.fleet.blob_urls` (what agents fetch) and
`coordinator.fleet.upload_urls` (updates that they send); which one is used is said by ``[blobs]`` of the configuration.
Nothing here decides about rounds or runs, and nothing here is needed: a blob that cannot go this way goes in chunks
over MQTT.

Read in this order: `signing` (short-lived paths with a proof), `http_requests` (what the endpoint reads and answers),
`inflow` (what has arrived of updates), `endpoint` (the coordinator's own), `ledger` (what is in a store of others),
`store_thread` (where a store is used), `object_store` (S3 and what else fsspec reaches), `stored_uploads` (updates by
way of it), and `opening` (which one it is).
"""
