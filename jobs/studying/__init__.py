"""What `jobs.study` is made of: cells of a comparison, trials of one video, tables of all."""
