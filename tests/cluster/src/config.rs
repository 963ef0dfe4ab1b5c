//! The components' configuration files, from the templates in `config/`.

use std::fs;

use anyhow::{Context, Result, ensure};

use crate::components::PAUSE_IMAGE;
use crate::spec::Spec;

/// Writes every configuration file below the cluster's state.
pub(crate) fn write(spec: &Spec) -> Result<()> {
    let run = spec.run();
    fs::create_dir_all(run.join("cni"))?;
    for (file, template) in [
        ("kubelet.yaml", include_str!("../config/kubelet.yaml")),
        ("containerd.toml", include_str!("../config/containerd.toml")),
        ("runsc.toml", include_str!("../config/runsc.toml")),
        ("Corefile", include_str!("../config/Corefile")),
        ("cluster.yaml", include_str!("../config/cluster.yaml")),
        ("cni/10-pods.conflist", include_str!("../config/cni.json")),
        // Pods ask CoreDNS; nothing here asks a name server outside.
        ("resolv.conf", "nameserver 127.0.0.1\n"),
    ] {
        let text = fill(template, &values(spec)).with_context(|| format!("in the template {file}"))?;
        fs::write(run.join(file), text)?;
    }
    Ok(())
}

pub(crate) fn values(spec: &Spec) -> Vec<(&'static str, String)> {
    let addresses = spec.addresses();
    let runsc = spec.parts.gvisor.as_deref().unwrap_or("/nonexistent".as_ref());
    vec![
        ("NODE_IP", addresses.node_ip()),
        ("API_SERVICE_IP", addresses.api_service_ip()),
        ("DNS_IP", addresses.dns_ip()),
        ("POD_CIDR", addresses.pod_cidr()),
        ("POD_FIRST", addresses.pod_first()),
        ("CGROUP", addresses.cgroup()),
        ("PKI", spec.pki().display().to_string()),
        ("RUN", spec.run().display().to_string()),
        ("CNI_BIN", spec.parts.containerd.display().to_string()),
        ("PAUSE_IMAGE", PAUSE_IMAGE.to_owned()),
        ("RUNC", "/usr/sbin/runc".to_owned()),
        ("RUNSC", runsc.join("runsc").display().to_string()),
    ]
}

/// Replaces each `${NAME}`; an unknown name is an error.
pub(crate) fn fill(template: &str, values: &[(&str, String)]) -> Result<String> {
    let text = values.iter().fold(template.to_owned(), |text, (name, value)| text.replace(&format!("${{{name}}}"), value));
    ensure!(!text.contains("${"), "a placeholder has no value: {text}");
    Ok(text)
}
