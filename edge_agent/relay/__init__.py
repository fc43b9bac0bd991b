"""The relay of a site: one connection to the coordinator's broker for all agents that use a broker of the site.

Agents connect to the broker of their site, as they would to the coordinator's. The relay passes their messages up and
the coordinator's down, and fetches each model once for all of them. It knows no keys of agents: these check commands
and models themselves, wherever they came from. So a relay can hold messages back, and can forge none of the
coordinator's. Where the coordinator asks for it, it sums the updates of the site. Nothing here trains, or decides who
takes part in a round.

Read in this order: `settings` (its configuration), `members` (the agents of the site), `site_blobs` (a model comes once
and is served to all), `update_files` (the updates of the site and their sum), `sums` (one upload in place of one for
each agent), `relay` (what passes in which direction), `certificate` (its renewal), `app` (the program).
"""
