"""Lance: names of files (`layout`), manifests (`manifest`), tags and branches (`refs`)."""
