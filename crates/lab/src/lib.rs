//! Networks out of namespaces, and the experiments of the seeds.
