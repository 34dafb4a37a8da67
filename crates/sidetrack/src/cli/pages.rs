//! `sidetrack completions` and `sidetrack man`: completions for shells and manual pages, made from the command line's own
//! definition, so that they always agree with it.

use anyhow::Context;
use clap::{Args, Command};
use clap_complete::Shell;
use clap_mangen::Man;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

/// The version that pages name.
const VERSION: &str = env!("CARGO_PKG_VERSION");

/// Prints completions for a shell
///
/// bash:  sidetrack completions bash >/usr/share/bash-completion/completions/sidetrack
/// zsh:   sidetrack completions zsh >/usr/share/zsh/vendor-completions/_sidetrack
/// fish:  sidetrack completions fish >/usr/share/fish/vendor_completions.d/sidetrack.fish
#[derive(Args, Clone, Debug)]
#[command(verbatim_doc_comment)]
pub struct CompletionsArgs {
    /// The shell
    #[arg(value_enum)]
    pub shell: Shell,
}

/// Arguments of `sidetrack man`.
#[derive(Args, Clone, Debug)]
pub struct ManArgs {
    /// The folder for the pages; it is created if it does not exist
    #[arg(value_name = "DIR")]
    pub folder: PathBuf,
}

/// Prints completions of `command` for a shell.
///
/// # Errors
/// Standard output cannot be written. A closed reader is not an error.
pub fn completions(mut command: Command, args: &CompletionsArgs) -> anyhow::Result<ExitCode> {
    let mut text = Vec::new();
    clap_complete::generate(args.shell, &mut command, "sidetrack", &mut text);
    match io::stdout().write_all(&text) {
        Err(error) if error.kind() != io::ErrorKind::BrokenPipe => Err(error.into()),
        _ => Ok(ExitCode::SUCCESS),
    }
}

/// Writes a manual page (section 1) of `command` and of each of its subcommands into a folder.
///
/// # Errors
/// The folder or a page cannot be written.
pub fn man(command: Command, args: &ManArgs) -> anyhow::Result<ExitCode> {
    let folder = &args.folder;
    std::fs::create_dir_all(folder).with_context(|| format!("cannot create {}", folder.display()))?;
    // Without the subcommand `help`, which would repeat every other one.
    let mut command = command.disable_help_subcommand(true);
    command.build();
    let written = pages(&command, "", folder)?;
    println!("{written} pages in {}", folder.display());
    Ok(ExitCode::SUCCESS)
}

/// Writes the page of `command` and the pages of its visible subcommands. `before`: the names of the commands that lead to it,
/// each followed by a hyphen. Returns how many pages it wrote.
fn pages(command: &Command, before: &str, folder: &Path) -> anyhow::Result<usize> {
    let name = format!("{before}{}", command.get_name());
    let path = folder.join(format!("{name}.1"));
    let mut text = Vec::new();
    let page = Man::new(command.clone().display_name(name.clone()).version(VERSION));
    page.title(name.to_uppercase())
        .source(concat!("Sidetrack ", env!("CARGO_PKG_VERSION")))
        .manual("Sidetrack")
        .render(&mut text)?;
    std::fs::write(&path, text).with_context(|| format!("cannot write {}", path.display()))?;
    let subcommands = command.get_subcommands().filter(|subcommand| !subcommand.is_hide_set());
    subcommands
        .map(|subcommand| pages(subcommand, &format!("{name}-"), folder))
        .sum::<anyhow::Result<usize>>()
        .map(|below| below + 1)
}
